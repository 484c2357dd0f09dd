"""What a run is: the typed tree, presets, loading and explaining."""
