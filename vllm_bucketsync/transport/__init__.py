"""How a region is shared: one contract, one module for each way."""
