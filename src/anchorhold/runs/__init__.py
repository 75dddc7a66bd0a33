"""Files on disk: run folders, records, locks and atomic writes. Loads without torch."""
