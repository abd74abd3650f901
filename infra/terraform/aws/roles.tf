# Two roles. Both use the store, with the same objects: an attempt writes its own artifact and reads those of others, and
# garbage collection runs on the head. Only the head starts and ends machines, and only those of its own cluster.

data "aws_caller_identity" "me" {}

data "aws_partition" "this" {}

locals {
  account  = data.aws_caller_identity.me.account_id
  ec2      = "arn:${data.aws_partition.this.partition}:ec2:${var.region}:${local.account}"
  store    = "${aws_s3_bucket.store.arn}/${var.prefix}/*"
  datasets = [for bucket in var.dataset_buckets : "arn:${data.aws_partition.this.partition}:s3:::${bucket}"]
  launched = ["instance", "volume", "network-interface"]
}

data "aws_iam_policy_document" "machines" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }

  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"] # EKS Pod Identity, for clusters/kuberay/components/eks

    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "store" {
  statement {
    sid       = "Objects"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    resources = [local.store]
  }

  statement {
    sid       = "Listing"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.store.arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.prefix}/*"]
    }
  }

  statement {
    sid       = "Bucket"
    actions   = ["s3:GetBucketLocation", "s3:GetBucketVersioning", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.store.arn]
  }

  dynamic "statement" {
    for_each = length(local.datasets) > 0 ? [1] : []

    content {
      sid       = "Datasets"
      actions   = ["s3:GetObject", "s3:ListBucket", "s3:GetBucketLocation"]
      resources = concat(local.datasets, [for arn in local.datasets : "${arn}/*"])
    }
  }
}

data "aws_iam_policy_document" "launcher" {
  statement {
    sid = "Look"
    actions = [
      "ec2:DescribeAvailabilityZones",
      "ec2:DescribeImages",
      "ec2:DescribeInstances",
      "ec2:DescribeInstanceTypes",
      "ec2:DescribeKeyPairs",
      "ec2:DescribeSecurityGroups",
      "ec2:DescribeSpotInstanceRequests",
      "ec2:DescribeSubnets",
      "ec2:DescribeVpcs",
    ]
    resources = ["*"] # EC2 knows no finer grain for these
  }

  statement {
    sid       = "Launch"
    actions   = ["ec2:RunInstances"]
    resources = [for kind in concat(local.launched, ["key-pair", "placement-group", "capacity-reservation", "security-group", "subnet"]) : "${local.ec2}:${kind}/*"]
  }

  statement {
    sid       = "LaunchImages"
    actions   = ["ec2:RunInstances"]
    resources = ["arn:${data.aws_partition.this.partition}:ec2:${var.region}::image/*"]
  }

  # Who may tag any machine could make it one of the cluster, and end it.
  statement {
    sid       = "TagAtLaunch"
    actions   = ["ec2:CreateTags"]
    resources = [for kind in local.launched : "${local.ec2}:${kind}/*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["RunInstances"]
    }
  }

  statement {
    sid       = "TagItsOwn" # Ray notes there how far a node is
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:ResourceTag/ray-cluster-name"
      values   = [var.name]
    }
  }

  statement {
    sid       = "EndItsOwn"
    actions   = ["ec2:TerminateInstances", "ec2:StopInstances", "ec2:StartInstances"]
    resources = ["${local.ec2}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:ResourceTag/ray-cluster-name"
      values   = [var.name]
    }
  }

  statement {
    sid       = "HandTheWorkersTheirRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.worker.arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }

  statement { # in an account that has never used spot, the first request makes this role
    sid       = "MakeTheRoleOfSpot"
    actions   = ["iam:CreateServiceLinkedRole"]
    resources = ["arn:${data.aws_partition.this.partition}:iam::*:role/aws-service-role/spot.amazonaws.com/*"]

    condition {
      test     = "StringEquals"
      variable = "iam:AWSServiceName"
      values   = ["spot.amazonaws.com"]
    }
  }

  statement {
    sid       = "LookAtProfiles"
    actions   = ["iam:GetInstanceProfile"]
    resources = [aws_iam_instance_profile.worker.arn, aws_iam_instance_profile.head.arn]
  }
}

resource "aws_iam_role" "head" {
  name               = "${var.name}-head"
  assume_role_policy = data.aws_iam_policy_document.machines.json
}

resource "aws_iam_role" "worker" {
  name               = "${var.name}-worker"
  assume_role_policy = data.aws_iam_policy_document.machines.json
}

resource "aws_iam_role_policy" "head_store" {
  name   = "store"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.store.json
}

resource "aws_iam_role_policy" "head_launcher" {
  name   = "launcher"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.launcher.json
}

resource "aws_iam_role_policy" "worker_store" {
  name   = "store"
  role   = aws_iam_role.worker.id
  policy = data.aws_iam_policy_document.store.json
}

resource "aws_iam_instance_profile" "head" {
  name = aws_iam_role.head.name
  role = aws_iam_role.head.name
}

resource "aws_iam_instance_profile" "worker" {
  name = aws_iam_role.worker.name
  role = aws_iam_role.worker.name
}
