"""Mixture-of-experts routers, dispatch and grouped-GEMM experts for PyTorch."""
