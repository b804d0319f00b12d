"""The gateway's console: pages for the one who runs it, in a process of its own.

It knows of the gateway only what its HTTP API tells (`/admin/v1/…`, and `/v1/…` for the chat page), so whatever
happens here, the relay's process has no part in it.
"""
