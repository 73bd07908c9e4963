"""Slots that are written by key: each write first removes what they hold for the key (docs/model.md)."""
