# What a Ray cluster on EC2 needs beside itself: a bucket, two roles with no more rights than they use, a security group.
#
#   terraform init && terraform plan -var bucket=my-lab-pretraining && terraform apply -var bucket=my-lab-pretraining
#
# Its state holds no secrets. Keep it in a bucket of its own all the same: add a backend block in backend.tf.

terraform {
  required_version = ">= 1.5"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.40, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = {
      project = var.name
    }
  }
}
