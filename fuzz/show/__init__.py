"""The page of one trace: the cache after each operation, drawn. Start in `page.py`."""
