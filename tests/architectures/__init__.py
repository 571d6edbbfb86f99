"""Every architecture of transformers and timm, small, compiled beside eager: ``python -m tests.architectures --help``."""
