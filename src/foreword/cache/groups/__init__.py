"""Groups of layers with one attention type, and coordinators that find the hits on which all groups agree."""
