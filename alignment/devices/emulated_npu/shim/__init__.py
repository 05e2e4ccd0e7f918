"""Directory that ``install()`` puts on ``sys.path``, so that ``import torch_npu`` finds the emulated one."""
