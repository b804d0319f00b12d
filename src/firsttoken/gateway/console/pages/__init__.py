"""The pages, a file each. Every one has `build(view)`; `app.py` says at which address."""
