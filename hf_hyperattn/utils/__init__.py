"""Helpers without knowledge of attention: files, folders, short texts, facts about tensors."""
