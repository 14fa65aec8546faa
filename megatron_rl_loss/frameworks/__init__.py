"""Adapters for frameworks that have their own training loop: each module is named for the framework it serves."""
