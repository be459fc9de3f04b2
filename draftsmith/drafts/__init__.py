"""The draft algorithms. Registration is this one dict."""

from draftsmith.drafts.base import Draft
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config

DRAFTS: dict[str, type[Draft]] = {"eagle3": Eagle3}
AnyDraftConfig = Eagle3Config
"""Settings of any draft, told apart by `kind`."""
