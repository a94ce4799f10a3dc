"""fedclade on Flower: real federations of machines. The only part that knows flwr; needs pip
install 'fedclade[flower]'.
"""
