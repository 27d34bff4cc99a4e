"""Direct calls of vendors' libraries; the only place of this package that imports them."""
