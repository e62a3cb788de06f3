"""Who holds which KV page, and which prefixes are already computed.

`pages` and `prefix` are pure bookkeeping over page numbers: no tensors, no clock, no I/O. One rule covers sharing:
**whoever uses a page holds one reference of it**, a running request for each page of its table and the prefix cache for
each page it keeps. A page without references is free, so free + used + cached = all holds by construction:

    free    no references
    cached  the prefix cache holds one, whether or not running requests hold others
    used    only running requests hold references
"""
