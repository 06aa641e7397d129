"""Builds the device before the tests, or says why they will be skipped."""

from tests.helpers.fake_cuda.build import built, why_not

if reason := why_not():
    print(f"Tests on a device in host memory are skipped: {reason}")
else:
    print("Building the CUDA device in host memory for the tests (about 1 minute)", flush=True)
    built()
