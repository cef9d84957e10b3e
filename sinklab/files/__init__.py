"""One way to files: on a disk that this machine sees, or in a bucket."""
