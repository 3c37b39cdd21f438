"""Codecs: how a block is stored below memory."""
