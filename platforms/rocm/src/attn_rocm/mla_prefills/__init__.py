"""What prefills over latents on AMD GPUs alone, one file each; torch's is in attn-torch."""
