"""Packaging: `kernels/` at the top level is installed as `hf_taco_scape.kernels`.

`kernels` is also the import name of Hugging Face's hub-kernels package, so our folder has no `__init__.py`: it is a
namespace sub-package here and can never shadow theirs, whatever is on `sys.path`.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["hf_taco_scape", "hf_taco_scape.*"]), "hf_taco_scape.kernels"],
    package_dir={"hf_taco_scape.kernels": "kernels"},
)
