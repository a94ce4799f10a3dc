"""fedclade on Flower: federations of several machines. Only this package imports flwr; it needs
pip install 'fedclade[flower]'.
"""
