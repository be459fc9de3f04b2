"""What every other package stands on: data types, configuration, logging and safe files. Imports nothing of ours."""
