"""Print what CMake needs to know about the running Python and its torch."""

import os
import sysconfig

# The plugin being built must not be imported by the torch it is built for.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch

if not torch.compiled_with_cxx11_abi():
    raise SystemExit("this torch uses the pre-C++11 ABI, which fusedpg does not support")

print(f"FUSEDPG_TORCH_VERSION={torch.__version__.split('+')[0]}")
print(f"FUSEDPG_TORCH_FULL_VERSION={torch.__version__}")
print(f"FUSEDPG_TORCH_CUDA={torch.version.cuda or ''}")
print(f"FUSEDPG_PYTHON_INCLUDE_DIR={sysconfig.get_paths()['include']}")
print(f"FUSEDPG_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}")
print(f"TORCH_DIR={os.path.dirname(os.path.abspath(torch.__file__))}")
