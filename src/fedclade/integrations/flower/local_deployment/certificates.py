"""Certificates and keys of a federation: a CA, the SuperLink's TLS certificate, and a key for each
node.
"""

from __future__ import annotations

import datetime
import os
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 825  # the longest validity that all TLS clients accept


def write_server_certificate(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key (0600) for 127.0.0.1 and localhost.

    The key of the CA is discarded, so it cannot sign a second server.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority, server = _name("fedclade federation CA"), _name("fedclade SuperLink")
    signer = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    ca = (
        _certificate(authority, authority, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(signer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    addresses = x509.SubjectAlternativeName(
        [x509.IPAddress(IPv4Address("127.0.0.1")), x509.DNSName("localhost")]
    )
    certificate = (
        _certificate(server, authority, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(addresses, critical=False)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False
        )
        .sign(authority_key, hashes.SHA384())
    )
    _write(folder / "ca.crt", ca.public_bytes(Encoding.PEM), 0o644)
    _write(folder / "server.pem", certificate.public_bytes(Encoding.PEM), 0o644)
    _write(
        folder / "server.key",
        server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        0o600,
    )


def write_node_key(path: Path) -> None:
    """Write a P-384 key like `ssh-keygen -t ecdsa -b 384`: PATH (0600) and PATH.pub. Flower reads
    no other format.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    _write(
        path.with_name(f"{path.name}.pub"),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n",
        0o644,
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    # An hour ago, because clocks differ.
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=DAYS))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file; others cannot read it at any moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
