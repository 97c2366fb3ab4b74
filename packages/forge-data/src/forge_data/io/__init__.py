"""Files of text: found below folders, unpacked, and read as tables."""
