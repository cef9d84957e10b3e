"""Storage: the same file operations on local disks and in buckets."""
