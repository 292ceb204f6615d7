"""Tenants: who may call, what they may do and use."""
