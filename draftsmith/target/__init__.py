"""The frozen target: its embedding, norm and head (`Target`), and the whole model that runs and is tapped (`TargetModel`)."""
