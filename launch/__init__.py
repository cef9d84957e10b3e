"""Launchers of `sinklab` jobs on TPU pods, Kubernetes and SLURM.

python -m launch.queued_resources --help
python -m launch.jobset --help
python -m launch.slurm --help
"""
