"""Bridges between the store and MCP SDKs; import the module of the SDK you use."""
