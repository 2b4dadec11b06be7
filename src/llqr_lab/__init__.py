"""The lab of ``llqr``: its command line, demonstrations and benchmarks.

It needs the extra ``lab`` (``pip install 'llqr[lab]'``); the library ``llqr`` needs PyTorch alone.
"""
