"""Adapters for other packages, which are not installed with foreword."""
