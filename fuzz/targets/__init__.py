"""Caches under test, each behind the contract of `base.Target`."""
