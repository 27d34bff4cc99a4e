"""What prefills over latents on NVIDIA GPUs alone, one file each; torch's is in attn-torch."""
