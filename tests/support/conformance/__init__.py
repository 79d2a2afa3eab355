"""As if started from the new checkpoint: one proof for every model, dtype and engine mode."""
