"""Images to files and objects and back: spool, upload in the same pass, verified fetch."""
