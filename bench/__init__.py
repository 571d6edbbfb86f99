"""Benchmarks: whole models, memory-bound kernels, host overhead and compile time, measured beside eager and Inductor.

Example:
    python -m bench.run --suite models --case llama --systems eager,inductor,dynafuse --out llama.json
    python -m bench.table llama.json
"""
