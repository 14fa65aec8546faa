"""Thin adapters: this package's aggregation behind the signatures of other frameworks. Import the one you run."""
