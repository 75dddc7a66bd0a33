"""Settings, built from recipes and overrides."""
