"""Orbax: what it raises in one line, and led to buckets."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint.log_filters import suppress_orbax_logs
from sinklab.files.patience import StorageTimeoutError
from sinklab.files.place import is_remote
from sinklab.record import UserError

TEMPORARY_SUFFIX = '.orbax-checkpoint-tmp'  # in the name of what is being saved
REGION_VARIABLES = 'AWS_REGION', 'AWS_DEFAULT_REGION'
# Nothing of the files.
UNRELATED_ERRORS = (UserError, MemoryError, PermissionError, TimeoutError, StorageTimeoutError, jax.errors.JaxRuntimeError)


@contextlib.contextmanager
def shorten_read_errors(path: Path) -> Iterator[None]:
    """Says in one line what Orbax says of a checkpoint in thousands of characters."""
    try:
        with suppress_orbax_logs():
            yield
    except UNRELATED_ERRORS:
        raise
    except Exception as error:  # of any kind: what a file raises depends on what is wrong with it
        raise UserError(
            f'{path} cannot be read ({describe_root_cause(error)}); it is of another version, or has changed since it was '
            'verified: see sinklab checkpoint verify'
        ) from error


@contextlib.contextmanager
def use_orbax_context(path: Path) -> Iterator[None]:
    """Have Orbax make folders before it starts threads, and save and load in the bucket of a path.

    Threads that Orbax starts before the folders wait 300 s for a folder that cannot be made, and the process cannot
    end meanwhile. In a bucket nothing is renamed: what is saved ends with a file that says so.
    """
    context = ocp.Context()
    context.async_options.create_directories_asynchronously = False
    if is_remote(path):
        if str(path).startswith('s3://'):
            patch_orbax_for_s3()
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    with context:
        yield


def patch_orbax_for_s3() -> None:
    """Has Orbax, which names drivers of TensorStore for disks and gs:// alone, name the one for s3://, too."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if tensorstore_utils._use_gcs_driver is is_bucket_path:
        return
    normalize_path, get_gcs_driver = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
    tensorstore_utils._use_gcs_driver = is_bucket_path
    tensorstore_utils._normalize_path = lambda path: normalize_path(path).replace('s3:/', 's3://')
    gcs_utils.get_kvstore_for_gcs = lambda path: make_s3_driver(path) if path.startswith('s3://') else get_gcs_driver(path)


def is_bucket_path(directory: str) -> bool:
    return directory.startswith(('gs://', 's3://'))


def make_s3_driver(path: str) -> dict[str, Any]:
    """TensorStore's driver of a path, at the endpoint and in the region that the variables of AWS name."""
    bucket, _, key = path.removeprefix('s3://').partition('/')
    options = dict(endpoint=get_variable('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL'), aws_region=get_variable(*REGION_VARIABLES))
    if get_variable('AWS_ACCESS_KEY_ID'):  # nothing else need be tried, with a complaint about each
        options['aws_credentials'] = {'type': 'environment'}
    return dict(driver='s3', bucket=bucket, path=key) | {name: value for name, value in options.items() if value}


def get_variable(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def describe_root_cause(error: BaseException) -> str:
    """The beginning of what it all came from."""
    while error.__cause__:
        error = error.__cause__
    return f'{type(error).__name__}: {" ".join(str(error).split())[:160]}'
