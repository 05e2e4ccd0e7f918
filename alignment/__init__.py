"""alignment: does an RL training stack on Ascend NPUs compute what the same stack computes on GPUs?"""

__version__ = "0.1.0"
