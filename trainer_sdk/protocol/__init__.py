"""The part that supervisor and training code share: messages, control page, names, images.

Standard library and msgspec only; specified in FORMAT.md beside this file.
"""
