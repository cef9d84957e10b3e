"""Jobs of `sinklab` on pods and clusters: python -m launch.queued_resources | launch.jobset | launch.slurm --help"""
