"""A live view of a server: what is shown (picture, viewer), how it looks (view), where (terminal).

The view is a function of what is shown and of the terminal's size; nothing here knows the contract.
"""
