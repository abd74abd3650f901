"""Create buckets; those that exist are left alone. Server and credentials are what boto3 finds in the environment."""

import sys

import boto3
from botocore.exceptions import ClientError


def main() -> None:
    """Arguments: names of buckets."""
    client = boto3.client("s3")
    for name in sys.argv[1:]:
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise


if __name__ == "__main__":
    main()
