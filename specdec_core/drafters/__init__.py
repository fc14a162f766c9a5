"""Drafters: one protocol (``base``), one file each."""

from .base import Drafter, Proposal
from .composite import CompositeDrafter
from .early_exit import EarlyExitDrafter, early_exit
from .model import ModelDrafter
from .prompt_lookup import PromptLookupDrafter
from .reduced import most_frequent, reduced_head
from .suffix import SuffixDrafter
from .translated import TranslatedDrafter

__all__ = [
    "CompositeDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "ModelDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "SuffixDrafter",
    "TranslatedDrafter",
    "early_exit",
    "most_frequent",
    "reduced_head",
]
