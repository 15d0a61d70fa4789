"""Groups of layers that remember alike, and coordinators that find the hits on which all groups agree."""
