"""Programs to copy: each is one file that uses nothing of this package but public names."""
