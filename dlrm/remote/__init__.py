"""Objects named by URIs: fetched to local files, and published from them.

Maps, work folders, staging and locks need local files, so two edges serve all that reads and writes
by URI. Files of a URI are fetched into a cache (`cache.py`), and a finished directory is published
(`publish.py`). `store.py` is the one place that talks to a storage service.
"""
