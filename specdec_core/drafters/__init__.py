"""Drafters: one protocol (``base``), one file each."""

from .base import Drafter, Proposal
from .model import ModelDrafter
from .prompt_lookup import PromptLookupDrafter

__all__ = ["Drafter", "ModelDrafter", "PromptLookupDrafter", "Proposal"]
