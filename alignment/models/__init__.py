"""The golden DeepSeek/Moonlight-style model in plain PyTorch: the specification other implementations are judged by."""
