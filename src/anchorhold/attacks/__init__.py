"""Attack goals by name (`menu`), and how one is run (`run`)."""
